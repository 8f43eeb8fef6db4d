"""`image build`: from a stock image, wherever it is stored, to its block image."""
