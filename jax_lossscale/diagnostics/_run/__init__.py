"""What a run did, and what it would have done with another loss scale."""
