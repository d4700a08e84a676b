//! The gRPC and HTTP ports, tested by clients.

mod descriptions;
mod health;
mod limits;
mod scores;
mod start_and_end;
mod wrong_requests;
