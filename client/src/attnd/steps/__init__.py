"""Steps: one decode or prefill through many layers, in an arena shared with the engine.

`attnd.Session.step` gives numpy arrays, `attnd.torch.TorchSession.step` torch tensors; both are a
`Stepper` over arenas of their own kind.
"""
