"""Training of P-EAGLE heads (and of the EAGLE-3 heads they are compared with)."""
