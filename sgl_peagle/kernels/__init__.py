"""Tensor operations of a P-EAGLE round.

| call | used in | implementation |
| --- | --- | --- |
| :func:`~sgl_peagle.kernels.expand.expand_decode` | every decode round | plain torch |
| :func:`~sgl_peagle.kernels.expand.expand_prefill` | every prefill batch | plain torch over a host-built index |
| :func:`~sgl_peagle.kernels.hidden.window_hidden` | inside the drafter forward | plain torch |
"""
