"""Programs as data: jaxprs are traced, read, evaluated and rewritten here, without an opinion about precision."""
