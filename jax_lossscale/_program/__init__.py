"""Programs as data: jaxprs traced, read, evaluated and rewritten. No opinion about precision."""
