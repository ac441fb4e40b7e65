"""Training of P-EAGLE heads (and of the EAGLE-3 heads they are compared with).

``corpus`` what is trained on · ``rows`` the layout, pure arithmetic · ``batches`` documents that share a step · ``attention``
who sees whom, in two backends · ``model`` the head · ``target`` the frozen target · ``losses`` the chunked loss ·
``partition`` P-EAGLE's loss, whole or in segments · ``eagle3`` the training-time test · ``holdout`` acceptance on held-out
documents · ``loop`` the run, with ``settings``, ``checkpoint`` and ``export`` · ``cli`` the command.
"""
