"""The trainer: a DLRM on TorchRec, sharded, fed by `ingest`, tuned by `agent`."""
