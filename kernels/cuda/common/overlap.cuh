// Kernels that begin while their predecessor on the stream ends (programmatic launch, sm_90 and later).
#pragma once

// A kernel launched to overlap its predecessor: the next one may start its prologue; what earlier
// kernels wrote may be read and overwritten. Elsewhere these do nothing.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
