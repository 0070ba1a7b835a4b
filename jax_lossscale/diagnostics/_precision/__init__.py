"""Which products must stay float32, found by measurement."""
