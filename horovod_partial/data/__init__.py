"""Decides which samples each rank gets, for all frameworks."""
