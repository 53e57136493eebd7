"""Raw images, text, tables and arrays into a format that trains fast."""
