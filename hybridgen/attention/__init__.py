"""Where attention runs. An executor does one layer's decode attention for one micro-batch."""
