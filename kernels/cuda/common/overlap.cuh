// Kernels that begin while their predecessor on the stream ends (programmatic launch, sm_90 and later).
#pragma once

// The next kernel of the stream, if it was launched to overlap its predecessor, may begin once every block has
// called the first or ended. The second returns when the predecessor has ended: its output can be read and
// overwritten. Elsewhere, and without a predecessor to overlap, they do nothing.
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
