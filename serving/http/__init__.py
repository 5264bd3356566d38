"""HTTP: guard, routes, OpenAPI and logs; imports every part of ``serving`` but the doors that start it."""
