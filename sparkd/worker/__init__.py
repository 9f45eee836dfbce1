"""Runs requests: sequences, scheduler, engine, sampler."""
