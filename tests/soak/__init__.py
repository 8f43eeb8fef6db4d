"""What only many repetitions show. The long counts among them are marked `soak`."""
