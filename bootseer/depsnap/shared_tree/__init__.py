"""The node's unpacked trees and how a target gets one."""
