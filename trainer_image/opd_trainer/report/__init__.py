"""The HTML report of a run and the records it is made of."""
