"""P-EAGLE heads on disk: which folder and format, what the config says, which tensors it holds."""

from sgl_peagle.heads.config import PEagleHeadConfig, RopeConfig
from sgl_peagle.heads.reader import Head, read_head

__all__ = ["Head", "PEagleHeadConfig", "RopeConfig", "read_head"]
