"""The tests of bootseer, by what they need: `unit` first, `soak` last."""
