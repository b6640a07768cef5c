"""Keys and values of a micro-batch: on the device, or split between device and host."""
