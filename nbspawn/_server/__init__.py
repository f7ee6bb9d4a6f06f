"""What runs in the importer and the fork servers, before there are ranks."""
