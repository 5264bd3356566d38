"""The wire format: schemas of requests and answers, errors, Arrow streams; imports no other part of ``serving``."""
