"""The workshop: estimators are made here, and the record of how is kept."""
