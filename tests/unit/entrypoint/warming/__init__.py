"""Tests of making a node ready."""
