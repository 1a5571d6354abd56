"""Tests of padded programs."""
