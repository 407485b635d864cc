"""HTTP: E2B-compatible and native routes, authentication, the error table. Decides nothing."""
