"""The archive: records of closed steps in Parquet files by job and hour, and how they move there from the spool."""
