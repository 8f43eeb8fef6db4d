"""Manifests: bootseer put into any pod template, and taken out again."""
