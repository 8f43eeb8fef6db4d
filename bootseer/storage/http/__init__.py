"""Objects of web servers: pooled HTTP/1.1 connections and the read-only store over them."""
