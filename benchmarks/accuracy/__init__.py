"""A benchmark that compares the results of small trainings in float16 and float32."""
