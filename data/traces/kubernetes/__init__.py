"""The Kubernetes trace: a fetched history becomes canonical tables; imports the layout of histories and dialects."""
