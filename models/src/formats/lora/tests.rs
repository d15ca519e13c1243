use super::config::AdapterConfig;
