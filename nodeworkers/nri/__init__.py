"""The slot at container start: an NRI plugin that grants or refuses it, and seat-init, which starts servers anew."""
