"""The engine: one prefill and one decode loop for every device, strategy and batch size."""
