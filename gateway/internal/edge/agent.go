package edge

import (
	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Agent returns the connection to an agent, for a call that is about no sandbox. done ends its use. It does no I/O.
func (r *Router) Agent(address, agentUID string) (conn grpc.ClientConnInterface, done func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, err := r.connect(place{target: rpc.Target{AgentUID: agentUID}, address: address}, false)
	if err != nil {
		return nil, nil, err
	}
	a.calls++
	return a.conn, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		a.calls--
		a.used = r.config.Clock.Now()
	}, nil
}
