"""The formats P-EAGLE heads are published in, behind one interface (:class:`HeadFormat`)."""

from sgl_peagle.heads.formats.base import HeadFormat
from sgl_peagle.heads.formats.detect import FORMATS, config_format, detect, format_named

__all__ = ["FORMATS", "HeadFormat", "config_format", "detect", "format_named"]
