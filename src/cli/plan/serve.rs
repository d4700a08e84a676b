//! The flags of `plan` that say what is to be served.

use anyhow::anyhow;

use crate::cli::InputError;
use crate::cli::flags::positive_count;
use crate::planner::capacity::Demand;
use crate::planner::trace::Trace;
use crate::schema::Schema;

/// Flags that ask for the number of replicas.
#[derive(Debug, clap::Args)]
pub(super) struct ServeFlags {
    /// Also computes how many replicas serve this rate of scores, such as 1M, with each size of the cache
    #[arg(long, value_name = "N", value_parser = positive_count, requires = "replica_scores_per_s")]
    scores_per_s: Option<f64>,
    /// Scores per second of one replica, as `load --find-p99` measures them
    #[arg(long, value_name = "N", value_parser = positive_count, requires = "scores_per_s")]
    replica_scores_per_s: Option<f64>,
    /// Reads of 4 KiB per second that the disk of a replica does [default: none, the tables are in memory]
    #[arg(long, value_name = "N", value_parser = positive_count, requires = "scores_per_s")]
    replica_reads_per_s: Option<f64>,
    /// Bytes of the tables to serve, such as 10T, if they are larger than those of --model-config
    #[arg(long, value_name = "BYTES", value_parser = positive_count, requires = "scores_per_s")]
    table_bytes: Option<f64>,
    /// Rows that a score looks up [default: as in the data; needed with --format trace]
    #[arg(long, value_name = "N", value_parser = positive_count, requires = "scores_per_s")]
    rows_per_score: Option<f64>,
}

impl ServeFlags {
    /// What is to be served, if the flags say it.
    pub(super) fn demand(&self, schema: &Schema, trace: &Trace) -> Result<Option<Demand>, InputError> {
        let (Some(scores_per_s), Some(replica_scores_per_s)) = (self.scores_per_s, self.replica_scores_per_s)
        else {
            return Ok(None);
        };
        let in_data = (trace.samples > 0).then(|| trace.accesses.len() as f64 / trace.samples as f64);
        let rows_per_score = self.rows_per_score.or(in_data).ok_or_else(|| {
            InputError(anyhow!(
                "--rows-per-score: expected, because access traces do not store the number of scores"
            ))
        })?;
        let of_model =
            schema.tables.iter().map(|t| t.stored_rows() as f64 * t.row_bytes() as f64).sum::<f64>();
        let table_bytes = self.table_bytes.unwrap_or(of_model);
        Ok(Some(Demand {
            scores_per_s,
            rows_per_score,
            replica_scores_per_s,
            replica_reads_per_s: self.replica_reads_per_s,
            table_bytes,
            scale: table_bytes / of_model,
        }))
    }
}
