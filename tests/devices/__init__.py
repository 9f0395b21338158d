"""Devices that this machine lacks: emulated, or told apart by what torch says of them."""
