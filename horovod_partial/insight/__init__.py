"""Tools that analyse jobs: recordings and reports of past jobs, advice on policies, and a simulator with its plots."""
