package budget

// Janitor is that of a scan of a node.
func Janitor() []Budget {
	return []Budget{
		{Key: "api_requests_per_container", Limit: 0, What: "requests to the API server for a healthy container and scan"},
	}
}
