"""Decisions in SQL: the schema, its rows and queries, and files of them."""
