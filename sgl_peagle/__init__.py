"""P-EAGLE (parallel-drafting EAGLE) speculative decoding for stock SGLang.

Installing this package is all that is needed: SGLang finds :func:`sgl_peagle.plugin.activate`
through the entry-point group ``sglang.srt.plugins`` and ``--speculative-algorithm PEAGLE`` works.
"""

__version__ = "0.1.0"
