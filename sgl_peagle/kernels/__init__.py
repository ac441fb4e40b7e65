"""Tensor operations of a P-EAGLE round. Each has a plain torch reference beside it; tests compare the two.

| call | used in | on a GPU (one launch) | elsewhere |
| --- | --- | --- | --- |
| :func:`~sgl_peagle.kernels.expand.expand_decode` | every decode round | ``expand_triton._decode_kernel`` | reference |
| :func:`~sgl_peagle.kernels.expand.expand_prefill` | every prefill batch | ``expand_triton._prefill_kernel`` | reference |
| :func:`~sgl_peagle.kernels.hidden.window_hidden` | inside the drafter forward | ``hidden_triton._window_hidden_kernel`` | reference |
| :func:`~sgl_peagle.kernels.window_attention.window_attention` | every layer, decode windows on Triton | ``window_attention_triton._window_kernel``, and ``_reduce_kernel`` in small batches | reference |
"""
