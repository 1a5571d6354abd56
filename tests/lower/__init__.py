"""Tests of device-local programs."""
