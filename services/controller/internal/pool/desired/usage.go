package desired

// Resource is a Sandbox resource of a pool.
type Resource struct {
	// UID of the sandbox.
	UID string
	// Agent is the uid of the agent Pod that it is assigned to, or empty.
	Agent string
	// Waiting: it is not assigned and waits for an agent.
	Waiting bool
	// Attempt is the number of its last attempt.
	Attempt int64
	// Finished: its process has ended.
	Finished bool
	// Deleting: it is being deleted.
	Deleting bool
	// Ports are those that it needs on its agent.
	Ports []int32
}

// Report is an agent's report of a container.
type Report struct {
	// Agent is the uid of the agent Pod.
	Agent string
	// UID and Attempt of the sandbox.
	UID     string
	Attempt int64
	// Finished: its process has ended.
	Finished bool
}

// Usage is what an agent is used for.
type Usage struct {
	// Held is the number of sandboxes that the agent has or may have, in any state. The agent cannot be deleted before it is 0.
	Held int
	// Finished is the number of held sandboxes whose process has ended. They use no capacity.
	Finished int
	// Live is the number of held sandboxes that use capacity.
	Live int
	// Reserved is the capacity in use according to the Registry, which knows of reservations, too.
	Reserved int
}

// Used returns the capacity of the agent that is in use.
func (u Usage) Used() int { return max(u.Live, u.Reserved) }

// Busy reports whether the agent has, or may have, a sandbox or a reservation.
func (u Usage) Busy() bool { return u.Held > 0 || u.Used() > 0 }

// Measure combines what the resources, the agents' reports and the Registry's reservations, by agent, say of a pool. A sandbox
// counts if either knows of it: on the fast path the report comes before the resource, otherwise after it. Of a sandbox that
// both know of, the report counts. A resource that is being deleted and that its agent does not report uses no capacity, and
// does not need any: after an outage of the controller there may be more of them than the agents can run.
func Measure(resources []Resource, reports []Report, reserved map[string]int, draining func(agent string) bool) (Load, map[string]Usage) {
	m := measurement{agents: map[string]map[string]held{}, ports: map[int32]int{}, waiting: map[string]int64{}, draining: draining}
	for _, r := range reports {
		m.addReport(r)
	}
	for _, r := range resources {
		m.addResource(r)
	}
	for _, r := range reports { // a waiting sandbox that a serving agent reports has its reservation; the resource is late
		if last, ok := m.waiting[r.UID]; ok && r.Attempt > last && !draining(r.Agent) {
			delete(m.waiting, r.UID)
		}
	}
	return m.result(reserved)
}

// measurement is the state of Measure.
type measurement struct {
	agents   map[string]map[string]held // by agent and sandbox
	ports    map[int32]int
	waiting  map[string]int64 // last attempts of waiting sandboxes
	draining func(agent string) bool
}

// held is a sandbox on an agent.
type held struct{ live, finished bool }

func (m *measurement) addReport(r Report) {
	if m.agents[r.Agent] == nil {
		m.agents[r.Agent] = map[string]held{}
	}
	h := m.agents[r.Agent][r.UID] // an agent may have containers of several attempts
	m.agents[r.Agent][r.UID] = held{live: h.live || !r.Finished, finished: r.Finished && !h.live}
}

func (m *measurement) addResource(r Resource) {
	needsPorts := r.Waiting
	switch {
	case r.Agent != "":
		if m.agents[r.Agent] == nil {
			m.agents[r.Agent] = map[string]held{}
		}
		h, reported := m.agents[r.Agent][r.UID]
		if !reported {
			h = held{live: !r.Finished && !r.Deleting, finished: r.Finished}
			m.agents[r.Agent][r.UID] = h
		}
		needsPorts = h.live && !m.draining(r.Agent)
	case r.Waiting:
		m.waiting[r.UID] = r.Attempt
	}
	if needsPorts {
		for _, port := range r.Ports {
			m.ports[port]++
		}
	}
}

func (m *measurement) result(reserved map[string]int) (Load, map[string]Usage) {
	usage := map[string]Usage{}
	for agent, sandboxes := range m.agents {
		u := Usage{Held: len(sandboxes)}
		for _, h := range sandboxes {
			switch {
			case h.live:
				u.Live++
			case h.finished:
				u.Finished++
			}
		}
		usage[agent] = u
	}
	for agent, n := range reserved {
		u := usage[agent]
		u.Reserved = n
		usage[agent] = u
	}
	var load Load
	unknown := 0 // reservations of sandboxes that nothing else knows of
	for agent, u := range usage {
		if !m.draining(agent) {
			load.Active += u.Used()
			unknown += u.Used() - u.Live
		}
	}
	// A waiting sandbox may already have one of these reservations. If it was counted twice, an agent would be created for
	// nothing.
	load.Pending = max(0, len(m.waiting)-unknown)
	if load.Pending > 0 {
		for _, n := range m.ports {
			load.PortDemand = max(load.PortDemand, n)
		}
	}
	return load, usage
}
