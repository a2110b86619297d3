package containerd

// Internals under test.
var Held = held

// Processes returns the processes of the server.
func (s *Server) Processes() []string { return s.processes() }
