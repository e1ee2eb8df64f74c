"""Aggregations over keyed state, in columns: what ``backend.aggregate`` runs."""
