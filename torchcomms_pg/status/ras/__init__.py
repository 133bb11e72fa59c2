"""Answers clients of NCCL's RAS, such as ``ncclras``, from the status of a job.

``python -m torchcomms_pg.status --ras ADDRESS`` runs `torchcomms_pg.status.ras.gateway`. As the
status, this package needs no torch.
"""
