"""Tools that trace, analyze, evaluate and rewrite jaxprs, independently of how `autocast` chooses dtypes."""
