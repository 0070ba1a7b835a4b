"""How loss scales do on traces of what gradients were: skipped steps, unused bits, steps to arrive."""
