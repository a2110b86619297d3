// Package events sends a shim's events to containerd, in order. While containerd is away, they wait.
package events

import (
	"context"
	"net"
	"sync"
	"time"

	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	sendTime = 5 * time.Second
	// retryTime is the time between two attempts to reach containerd.
	retryTime = 250 * time.Millisecond
	// maxWaiting bounds the events that wait. What is lost beyond that is found by those who list tasks.
	maxWaiting = 10_000
)

// Publisher sends events. Make it with New.
type Publisher struct {
	namespace, address string

	mu      sync.Mutex
	wake    *sync.Cond
	waiting []*types.Envelope
	closed  bool

	// client is nil while there is no connection. Only Run uses it.
	client *ttrpc.Client
}

// New returns a Publisher for containerd's socket.
func New(namespace, address string) *Publisher {
	p := &Publisher{namespace: namespace, address: address}
	p.wake = sync.NewCond(&p.mu)
	return p
}

// Publish queues an event. It returns at once.
func (p *Publisher) Publish(topic string, event any) {
	raw, err := typeurl.MarshalAnyToProto(event)
	if err != nil { // the types of this program are all known
		panic(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) >= maxWaiting {
		p.waiting = p.waiting[1:]
	}
	p.waiting = append(p.waiting, &types.Envelope{Timestamp: timestamppb.Now(), Namespace: p.namespace, Topic: topic, Event: raw})
	p.wake.Signal()
}

// Close has Run return when all events that wait are sent, or cannot be.
func (p *Publisher) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.wake.Signal()
}

// Run sends events until Close.
func (p *Publisher) Run() {
	for {
		p.mu.Lock()
		for len(p.waiting) == 0 && !p.closed {
			p.wake.Wait()
		}
		if len(p.waiting) == 0 {
			p.mu.Unlock()
			return
		}
		next, closed := p.waiting[0], p.closed
		p.mu.Unlock()
		err := p.send(next)
		if err != nil && !closed {
			<-time.After(retryTime)
			continue
		}
		p.mu.Lock()
		if len(p.waiting) > 0 && p.waiting[0] == next {
			p.waiting = p.waiting[1:]
		}
		p.mu.Unlock()
	}
}

func (p *Publisher) send(e *types.Envelope) error {
	if p.client == nil {
		conn, err := net.DialTimeout("unix", p.address, sendTime)
		if err != nil {
			return err
		}
		p.client = ttrpc.NewClient(conn)
	}
	ctx, cancel := context.WithTimeout(context.Background(), sendTime)
	defer cancel()
	_, err := eventsapi.NewTTRPCEventsClient(p.client).Forward(ctx, &eventsapi.ForwardRequest{Envelope: e})
	if err != nil {
		_ = p.client.Close()
		p.client = nil
	}
	return err
}
