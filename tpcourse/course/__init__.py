"""The course as a whole: setting it up, listing its lessons, running them all."""
