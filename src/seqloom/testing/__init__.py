"""What tests of Seqloom, and of code that builds on it, can share."""
